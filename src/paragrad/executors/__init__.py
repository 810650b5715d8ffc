"""What executes a schedule: interpreter, proof, clock, drawing, transport."""
