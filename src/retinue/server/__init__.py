"""The ASGI side: images of chat requests through the encoder, and what stands behind it."""
