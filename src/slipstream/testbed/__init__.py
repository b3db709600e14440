"""Several hosts with shaped links on one Linux machine, for trying a slow network without one.

    with Testbed(nodes=4, rate="1gbit") as bed:
        bed.check()                                        # what the links really carry
        bed.popen(bed.nodes[0], ["hostname"]).wait()       # a program on one host

Never touches the machine's own network, and needs neither torch nor, on most machines, root.
"""

from slipstream.testbed.link_check import LinkCheck
from slipstream.testbed.machine import unavailable
from slipstream.testbed.network import Node
from slipstream.testbed.rate import format_rate, parse_rate
from slipstream.testbed.testbed import Testbed

__all__ = ["LinkCheck", "Node", "Testbed", "format_rate", "parse_rate", "unavailable"]
