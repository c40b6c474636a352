"""Megatron-LM / megatron-core: launch wrapper, launch-script patcher, version checks, and the communication
hooks.

Importing this package imports neither torch nor megatron.
"""
