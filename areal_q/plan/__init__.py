"""`areal-q plan`: what a run will take and how fast it will be, before anything is rented or started."""
