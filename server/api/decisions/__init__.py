"""Questions about one state, answered with probabilities: TypeSafe's System One API, and OpenAI's decisions."""
