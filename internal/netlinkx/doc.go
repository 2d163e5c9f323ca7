// Package netlinkx wraps the calls of the netlink package that read whole tables:
// the kernel may say that a table changed while it was read, and then what was
// read may lack something.
package netlinkx
