"""The agent on a board: joins, trains, runs the INT8 model, survives."""

from edge_client.agent import Agent, AgentConfig, AgentState

__all__ = ["Agent", "AgentConfig", "AgentState"]
