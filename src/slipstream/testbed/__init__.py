"""Emulated hosts with shaped links on one Linux machine, to try a training on a slow network.

    with Testbed(nodes=4, rate="1gbit") as bed:
        bed.check()                                        # measure the links
        bed.popen(bed.nodes[0], ["hostname"]).wait()       # run a program on one host

The machine's own network stays as it is. Needs no torch and, on most machines, no root.
"""

from slipstream.testbed.link_check import LinkCheck as LinkCheck
from slipstream.testbed.machine import unavailable as unavailable
from slipstream.testbed.network import Distance as Distance, Node as Node
from slipstream.testbed.rate import format_rate as format_rate, parse_rate as parse_rate
from slipstream.testbed.testbed import Testbed as Testbed, stop_processes as stop_processes
