"""Samples of different lengths, dealt so that every rank computes for the same time."""

from slipstream.data.balance.batches import BalancedBatches as BalancedBatches
from slipstream.data.balance.cost import LengthCost as LengthCost, fit_cost as fit_cost
from slipstream.data.balance.deal import deal as deal, deal_padded as deal_padded
from slipstream.data.balance.loader import (
    BalancedLoader as BalancedLoader,
    SampleBalance as SampleBalance,
    is_balanceable as is_balanceable,
)
