"""Proofs that the server stays up and answers right under load, bad input and bad clients."""
