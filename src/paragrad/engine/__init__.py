"""The stages of a step, whatever the strategy: passes, exchange, layout, batch norm."""
