"""Gradients made smaller for the wire: tensor to payload to tensor, and what is kept between.

Never communicates: an exchange says what is to be moved (``exchange``), and others move it.
"""

from slipstream.codecs.compressor import Coder, Ranks
from slipstream.codecs.dgc import DgcCodec, DgcCoder, Momentum
from slipstream.codecs.exchange import (
    Exchange,
    Gather,
    Request,
    Sum,
    Swap,
    run_together,
    sent_bytes,
)
from slipstream.codecs.half import HalfCodec
from slipstream.codecs.int8 import Int8Codec
from slipstream.codecs.make import make_coder, wire_bytes
from slipstream.codecs.onebit import OneBitCodec
from slipstream.codecs.powersgd import PowerSgdCodec, PowerSgdCoder
from slipstream.codecs.residual import Residual
from slipstream.codecs.two_phase import TwoPhaseCoder

__all__ = [
    "Coder",
    "DgcCodec",
    "DgcCoder",
    "Exchange",
    "Gather",
    "HalfCodec",
    "Int8Codec",
    "Momentum",
    "OneBitCodec",
    "PowerSgdCodec",
    "PowerSgdCoder",
    "Ranks",
    "Request",
    "Residual",
    "Sum",
    "Swap",
    "TwoPhaseCoder",
    "make_coder",
    "run_together",
    "sent_bytes",
    "wire_bytes",
]
