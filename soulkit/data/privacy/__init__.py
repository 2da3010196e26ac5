"""Private content of conversations: canaries (made secrets) that measure what is remembered."""
