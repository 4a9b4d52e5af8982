"""Strategies of Lightning's Fabric and Trainer for sharded modules. Importing a module of this folder imports lightning."""
