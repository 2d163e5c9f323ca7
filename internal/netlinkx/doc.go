// Package netlinkx wraps the calls of the netlink package that read whole tables, and
// repeats them when the kernel reports that a table changed while it was read. It also
// decodes netlink attributes, and deletes conntrack entries.
package netlinkx
