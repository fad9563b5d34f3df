"""FadeFed: federated learning for edge boards on real, fading radio links."""

__version__ = "0.1.0"
