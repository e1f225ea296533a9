"""A pool over HTTP, in the shape of OpenAI's API. HTTP.md says what is taken, answered and refused.

schema, plans, choices and answers are pure; bridge owns the one pool client; app is plain ASGI;
Ray Serve is in deployment and serving alone.
"""
