"""OpenAI's Responses API: its bodies as chats, its replies, and the responses that are kept."""
