"""Gradient compression: tensor to payload to tensor, and the state that a codec keeps in between.

Never communicates: an exchange yields requests (``transport.requests``), which a transport carries
out.
"""

from slipstream.codecs.compressor import Compressor, Ranks
from slipstream.codecs.dgc import DgcCodec, DgcCompressor, Momentum
from slipstream.codecs.half import HalfCodec
from slipstream.codecs.int8 import Int8Codec
from slipstream.codecs.make import make_compressor, wire_bytes
from slipstream.codecs.onebit import OneBitCodec
from slipstream.codecs.powersgd import PowerSgdCodec, PowerSgdCompressor
from slipstream.codecs.residual import Residual
from slipstream.codecs.two_phase import TwoPhaseCompressor

__all__ = [
    "Compressor",
    "DgcCodec",
    "DgcCompressor",
    "HalfCodec",
    "Int8Codec",
    "Momentum",
    "OneBitCodec",
    "PowerSgdCodec",
    "PowerSgdCompressor",
    "Ranks",
    "Residual",
    "TwoPhaseCompressor",
    "make_compressor",
    "wire_bytes",
]
