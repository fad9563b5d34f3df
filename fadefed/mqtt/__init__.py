"""MQTT: topics, chunks, and the session with the broker."""

from fadefed.mqtt.chunks import Assembler, split
from fadefed.mqtt.session import BrokerAddress, Session
from fadefed.mqtt.topics import Topics

__all__ = ["Assembler", "BrokerAddress", "Session", "Topics", "split"]
