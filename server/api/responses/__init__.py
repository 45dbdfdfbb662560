"""OpenAI's Responses API: answers as items, kept by the server unless a request says otherwise, and conversations."""
