"""What backends share that have a torch module in this process as their model.

Nothing here knows how such a module is made or what its layers are. A trainer takes the optimizer
and the reference; generation takes the decoding engine and gives it the module's forward pass.
Every part is imported from its own module.
"""
