"""Images in prompts: files, vision towers, and what a text model gets of both."""
