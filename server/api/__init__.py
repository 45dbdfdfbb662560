"""Dialects: each module translates one public API to engine requests and events to bytes."""
