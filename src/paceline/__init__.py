"""Paceline: the open engine builder for speculative decoding."""

__version__ = "0.1.0"
