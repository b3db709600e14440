"""Tests of `slipstream.local`."""
