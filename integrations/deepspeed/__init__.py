"""Placeholder, filled by the integration."""
