"""Fleet on Kubernetes: what people write (`resources`), what becomes of it (`reconcile`, pure), and the loop around it."""
