"""Reinforcement learning of long-horizon LLM agents in JAX: MPO, Progress Advantage, TASPO and their baselines."""
