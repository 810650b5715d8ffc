"""The commands of the command line, and the functions of the library behind them."""
