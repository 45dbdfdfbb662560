"""The disk tier: state that outlives memory and the process."""
