"""What runs a schedule: interpreter, proof, clock, drawing, transport."""
