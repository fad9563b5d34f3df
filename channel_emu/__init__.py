"""Physics of the link as pure functions over devices, and the proxy that applies it to live MQTT traffic."""

from channel_emu.link import Channel, LinkConfig

__all__ = ["Channel", "LinkConfig"]
