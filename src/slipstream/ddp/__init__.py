"""Codecs for those who keep DistributedDataParallel."""

from slipstream.ddp.hook import DdpCodec, codec_hook

__all__ = ["DdpCodec", "codec_hook"]
