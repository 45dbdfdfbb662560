"""Requests, time, threads, HTTP and the process."""
