"""Gradient compression: tensor to payload to tensor, and the state that a codec keeps in between.

Never communicates: an exchange yields requests (``transport.requests``), which a transport carries
out.
"""

from slipstream.codecs.between_hosts import HostsCompressor as HostsCompressor
from slipstream.codecs.compressor import Compressor as Compressor, Ranks as Ranks
from slipstream.codecs.dgc import (
    DgcCodec as DgcCodec,
    DgcCompressor as DgcCompressor,
    Momentum as Momentum,
)
from slipstream.codecs.half import HalfCodec as HalfCodec
from slipstream.codecs.int8 import Int8Codec as Int8Codec
from slipstream.codecs.make import make_compressor as make_compressor, wire_bytes as wire_bytes
from slipstream.codecs.onebit import OneBitCodec as OneBitCodec
from slipstream.codecs.powersgd import (
    PowerSgdCodec as PowerSgdCodec,
    PowerSgdCompressor as PowerSgdCompressor,
)
from slipstream.codecs.residual import Residual as Residual
from slipstream.codecs.scatter import ScatterCompressor as ScatterCompressor
from slipstream.codecs.two_phase import TwoPhaseCompressor as TwoPhaseCompressor
