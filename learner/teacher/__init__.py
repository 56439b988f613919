"""Teachers, which score what the student drew: a model beside the policy, or a server."""
