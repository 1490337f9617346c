from zoo.cli import lightning_main

lightning_main()
