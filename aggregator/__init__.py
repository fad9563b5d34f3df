"""The service on the gateway: roster, exchanges with deadlines, checkpoints."""

from aggregator.service import Aggregator

__all__ = ["Aggregator"]
