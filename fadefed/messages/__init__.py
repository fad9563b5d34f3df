"""Exchange, Order, Report, Reception, and the codecs: as values and as bytes."""

from fadefed.messages.values import Access, Array, Exchange, Key, Order, Reception, Report, Scalar, SignalSpec

__all__ = ["Access", "Array", "Exchange", "Key", "Order", "Reception", "Report", "Scalar", "SignalSpec"]
