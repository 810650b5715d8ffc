"""What is checked before any rank starts."""
