"""Malformed and unusual input of every kind for a server that speaks OpenAI's API: whatever comes,
it answers in OpenAI's shape, and holds nothing afterwards."""
