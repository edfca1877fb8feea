from stateflow.cli import main

raise SystemExit(main())
