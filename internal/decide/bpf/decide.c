// SPDX-License-Identifier: MIT OR GPL-2.0-only

// A study: a program at ingress of devices that makes the kernel's conntrack entry of a new flow, with
// the endpoint in it. The kernel then translates the flow as if a rule had decided. IPv4, TCP and UDP.

#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/types.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#define PASS (-1) /* to the next program, or the stack */

union nf_inet_addr {
	__u32 all[4];
} __attribute__((preserve_access_index));

struct nf_conn {
	unsigned long status;
} __attribute__((preserve_access_index));

struct nf_conn___init {
	struct nf_conn ct;
} __attribute__((preserve_access_index));

enum nf_nat_manip_type {
	NF_NAT_MANIP_SRC,
	NF_NAT_MANIP_DST,
};

/* Its first 12 bytes, which every kernel accepts. */
struct bpf_ct_opts___first {
	__s32 netns_id;
	__s32 error;
	__u8 l4proto;
	__u8 dir;
	__u8 reserved[2];
};

struct nf_conn *bpf_skb_ct_lookup(struct __sk_buff *skb, struct bpf_sock_tuple *tuple, __u32 tuple_size,
				  struct bpf_ct_opts___first *opts, __u32 opts_size) __ksym;
struct nf_conn___init *bpf_skb_ct_alloc(struct __sk_buff *skb, struct bpf_sock_tuple *tuple, __u32 tuple_size,
					struct bpf_ct_opts___first *opts, __u32 opts_size) __ksym;
int bpf_ct_set_nat_info(struct nf_conn___init *ct, union nf_inet_addr *addr, int port, enum nf_nat_manip_type manip) __ksym;
void bpf_ct_set_timeout(struct nf_conn___init *ct, __u32 milliseconds) __ksym;
struct nf_conn *bpf_ct_insert_entry(struct nf_conn___init *ct) __ksym;
void bpf_ct_release(struct nf_conn *ct) __ksym;

struct frontend_key {
	__be32 addr;
	__be16 port;
	__u8 protocol;
	__u8 pad;
};

struct endpoint {
	__be32 addr;
	__u16 port; /* of the host's byte order */
	__u16 pad;
};

/* A Service of the study has one endpoint; more would cost one more read of an array. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, struct frontend_key);
	__type(value, struct endpoint);
} frontends SEC(".maps");

SEC("tc")
int decide(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct bpf_ct_opts___first opts = {.netns_id = BPF_F_CURRENT_NETNS};
	struct bpf_sock_tuple tuple = {};
	struct iphdr *ip = data + ETH_HLEN;
	struct udphdr *ports = (void *)(ip + 1);
	struct frontend_key key = {};
	struct endpoint *endpoint;
	struct nf_conn___init *new;
	union nf_inet_addr to = {};
	struct nf_conn *ct;

	if (skb->protocol != bpf_htons(ETH_P_IP) || (void *)(ports + 1) > end || *(__u8 *)ip != 0x45 ||
	    ip->frag_off & bpf_htons(0x3fff) || (ip->protocol != IPPROTO_TCP && ip->protocol != IPPROTO_UDP))
		return PASS;
	key.addr = ip->daddr;
	key.port = ports->dest;
	key.protocol = ip->protocol;
	endpoint = bpf_map_lookup_elem(&frontends, &key);
	if (!endpoint)
		return PASS; /* most packets */
	tuple.ipv4.saddr = ip->saddr;
	tuple.ipv4.daddr = ip->daddr;
	tuple.ipv4.sport = ports->source;
	tuple.ipv4.dport = ports->dest;
	opts.l4proto = ip->protocol;
	ct = bpf_skb_ct_lookup(skb, &tuple, sizeof(tuple.ipv4), &opts, sizeof(opts));
	if (ct)
		goto release;
	new = bpf_skb_ct_alloc(skb, &tuple, sizeof(tuple.ipv4), &opts, sizeof(opts));
	if (!new)
		return PASS;
	to.all[0] = endpoint->addr;
	bpf_ct_set_nat_info(new, &to, endpoint->port, NF_NAT_MANIP_DST);
	bpf_ct_set_timeout(new, 30000);
	ct = bpf_ct_insert_entry(new); /* NULL if another packet of the flow was faster */
	if (!ct)
		return PASS;
release:
	bpf_ct_release(ct);
	return PASS;
}

char licenses[] SEC("license") = "Dual MIT/GPL";
