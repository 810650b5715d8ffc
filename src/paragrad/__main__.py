from paragrad.cli import main

main()
