"""``python -m dct_plugin.megatron SCRIPT ARGS...``: run a Megatron training script with the plugin.

Only the short name for the command line; the work is done by :mod:`dct_plugin.integrations.megatron`.
"""
