from stateflow.cli import main

if __name__ == "__main__":  # processes that measure stages import this file again
    raise SystemExit(main())
