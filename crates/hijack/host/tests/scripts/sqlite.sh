# needs: sqlite3
# Tables on disk in both modes of the journal, and two programs that want one database.
rows=${WHOLE:+200000}
cat > statements <<END
pragma journal_mode=delete; create table t(a integer primary key, b text);
begin; with recursive n(i) as (select 1 union all select i+1 from n where i < ${rows:-5000}) insert into t select i, hex(i) from n; commit;
create index x on t(b); select count(*), sum(a), max(b) from t; update t set b = b || 'x' where a % 7 = 0;
pragma integrity_check; vacuum; pragma journal_mode=wal; delete from t where a % 2; select count(*) from t;
END
sqlite3 data < statements
for i in 1 2 3 4; do
    for j in 1 2 3 4 5; do echo ".timeout 20000
insert into t(b) values('$i');"; done | sqlite3 data &
done
wait
sqlite3 data 'select count(*) from t where length(b) = 1; pragma wal_checkpoint; select nothing;'; echo $?
rm -f data*
