"""State of past tokens: the prefix trie, live slots, paging, and the budget that holds them together."""
