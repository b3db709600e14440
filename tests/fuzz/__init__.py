"""Files that nobody should trust: made of good ones, read by all that reads them."""
