"""Who walks a schedule: in one process (walk), as a proof, as a drawing, on the wire."""
