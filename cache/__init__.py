"""State of past tokens: prefix trie, live slots, paging, and one budget."""
