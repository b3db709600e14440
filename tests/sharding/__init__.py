"""Tests of `slipstream.sharding`."""
