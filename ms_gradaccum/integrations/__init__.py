"""Steps and trainers of other projects, with this package's accumulation inside. None of them is imported unasked."""
