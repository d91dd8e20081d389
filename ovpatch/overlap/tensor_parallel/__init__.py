"""Tensor-parallel linears on local tensors: operators, and the schedules of their GEMMs and collectives.

``schedule_table`` lists the schedules, and imports no torch. ``schedules`` has a class for each schedule.
``functional`` has the operators for scripts, ``operators`` the operators for modules, and ``tp_autograd`` their
gradients.
"""
