// Package hostile holds tests only: whatever a tenant's objects have at the limits of the API server,
// what they cost is in proportion to them or bounded, for every engine, and another Service's
// change goes through beside them. SECURITY.md has the bounds.
package hostile
